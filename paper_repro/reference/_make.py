"""Makes the reference files of the BERT tests with PyTorch and transformers.

Run by hand in an environment that has `torch` and `transformers` (made with 2.13.0 and
5.24.0), from the root of the repository; nothing else here needs either:

    python paper_repro/reference/_make.py MINILM_FOLDER

`MINILM_FOLDER` is what `paper_repro.models.minilm_folder()` returns. Written are
`minilm.npz` (texts, word pieces and vectors of all-MiniLM-L6-v2) and `tiny_bert/` (a
random BERT as a checkpoint, and its states).
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

# By name: type checkers need not have them.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

HERE = Path(__file__).parent
# The first four are the example of the model's card.
TEXTS = [
    "That is a happy person",
    "That is a happy dog",
    "Today is a sunny day",
    "That is a very happy person",
    "Real-time strategy game of ancient warfare (data files)",
    "perl module: Encode::JIS2K & friends, v0.03!",
    "Übersetzungen für KDE - naïve café, 日本語",
    "A library that reads and writes compressed archives of many formats, with "
    "bindings for several languages, a command line, and documentation in HTML.",
]


def make_minilm(folder: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(TEXTS, padding="max_length", max_length=48, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    mean = (states * mask).sum(1) / mask.sum(1)
    np.savez_compressed(
        HERE / "minilm.npz",
        texts=np.array(TEXTS),
        ids=batch["input_ids"].numpy().astype(np.int32),
        mask=batch["attention_mask"].numpy().astype(bool),
        cls=states[:, 0].numpy(),
        mean_unit=torch.nn.functional.normalize(mean, dim=1).numpy(),
    )


def make_tiny() -> None:
    """A BERT with large weights and with biases that are not 0: each of them counts."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=12,
    )
    whole = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    folder = HERE / "tiny_bert"
    whole.save_pretrained(folder)
    _only_what_is_read(folder / "config.json")
    ids = torch.randint(1, 40, (3, 10))
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[1, 6:] = 0
    mask[2, 1:] = 0
    states = {}
    for activation in ("gelu", "gelu_new", "relu"):
        config.hidden_act = activation
        model = transformers.BertForMaskedLM(config).eval()
        model.load_state_dict(whole.state_dict())
        with torch.no_grad():
            out = model.bert(input_ids=ids, attention_mask=mask)
        states[activation] = out.last_hidden_state.numpy()
    np.savez_compressed(
        folder / "expected.npz",
        ids=ids.numpy().astype(np.int32),
        mask=mask.numpy().astype(bool),
        **states,
    )


def _only_what_is_read(path: Path) -> None:
    """Drops the fields that tell how the file was made, so that it stays the same."""
    config = json.loads(path.read_text())
    for key in ("transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    make_minilm(sys.argv[1])
    make_tiny()
