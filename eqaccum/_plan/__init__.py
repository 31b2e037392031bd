from ._arrays import LargeArray as LargeArray, largest_arrays as largest_arrays
from ._bytes import format_bytes as format_bytes, parse_bytes as parse_bytes
from ._cache import (
    Cache as Cache,
    Key as Key,
    Remembered as Remembered,
    open_cache as open_cache,
    program_key as program_key,
)
from ._conv_scratch import conv_scratch as conv_scratch
from ._limit import (
    Limit as Limit,
    Readers as Readers,
    cgroup_room as cgroup_room,
    read_limit as read_limit,
)
from ._probe import (
    fresh_bytes as fresh_bytes,
    is_out_of_memory as is_out_of_memory,
    program_bytes as program_bytes,
)
from ._record import (
    COMPILED as COMPILED,
    NO_FIGURES as NO_FIGURES,
    OUT_OF_MEMORY as OUT_OF_MEMORY,
    REMEMBERED as REMEMBERED,
    Parts as Parts,
    Plan as Plan,
    Probe as Probe,
)
from ._search import (
    Choices as Choices,
    Found as Found,
    Measurement as Measurement,
    distinct_passes as distinct_passes,
    every_number as every_number,
    pinned as pinned,
    search as search,
)
from ._table import html_table as html_table
