from ._bank import MemoryBank as MemoryBank
from ._coupled import Coupled as Coupled, coupled as coupled
