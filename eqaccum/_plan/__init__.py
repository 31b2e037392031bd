from ._bytes import format_bytes as format_bytes, parse_bytes as parse_bytes
from ._record import (
    COMPILED as COMPILED,
    NO_FIGURES as NO_FIGURES,
    OUT_OF_MEMORY as OUT_OF_MEMORY,
    REMEMBERED as REMEMBERED,
    Parts as Parts,
    Plan as Plan,
    Probe as Probe,
)
