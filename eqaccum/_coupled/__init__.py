from ._coupled import coupled as coupled
