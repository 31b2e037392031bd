"""Real data out of packages, and readers of the papers' own files."""

from ._beir import (
    Collection as Collection,
    read_beir as read_beir,
    read_beir_training as read_beir_training,
)
from ._debian import debian_pairs as debian_pairs
from ._dpr import (
    Passage as Passage,
    Question as Question,
    answered as answered,
    has_answer as has_answer,
    matches_answer as matches_answer,
    read_dpr_passages as read_dpr_passages,
    read_dpr_questions as read_dpr_questions,
    read_dpr_training as read_dpr_training,
)
from ._fashion import Images as Images, fashion_mnist as fashion_mnist
from ._pairs import (
    Pairs as Pairs,
    Split as Split,
    read_pairs as read_pairs,
    split as split,
    write_pairs as write_pairs,
)
from ._tfidf import (
    hard_negatives as hard_negatives,
    lexical_scores as lexical_scores,
    lexical_search as lexical_search,
    with_negatives as with_negatives,
)
from ._tokenizer import Tokenizer as Tokenizer, Tokens as Tokens
from ._wordnet import wordnet_pairs as wordnet_pairs
