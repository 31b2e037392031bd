from ._bank import MemoryBank as MemoryBank
from ._coupled import coupled as coupled
