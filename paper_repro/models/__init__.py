"""Text encoders in Equinox: one small, and BERT with its checkpoints."""

from .._minilm import minilm_folder as minilm_folder
from ._bert import (
    Bert as Bert,
    BertConfig as BertConfig,
    load_bert as load_bert,
    load_minilm as load_minilm,
)
from ._heads import (
    DualEncoder as DualEncoder,
    Pooling as Pooling,
    TextEncoder as TextEncoder,
    cls_state as cls_state,
    encode_all as encode_all,
    mean_state as mean_state,
    unit as unit,
)
from ._language import LanguageModel as LanguageModel, language_model as language_model
from ._transformer import Transformer as Transformer
