"""Data as other libraries hold it, with the libraries themselves where installed."""

import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum

ROWS = 22
Y = np.arange(ROWS, dtype=np.float32)
BITS = 2 ** np.arange(ROWS)


def loss(model, example, key):
    """The sum of the rows' bits tells which rows a batch had."""
    y, bit = example
    return (model - y) ** 2, {"rows": eqaccum.Sum(bit)}


def named_loss(model, example, key):
    return loss(model, (example["y"], example["bit"]), key)


def fit(data: Any, **more: Any) -> eqaccum.FitResult:
    arguments = {
        "global_batch": 4,
        "microbatch": 2,
        "loss": loss,
        "optimizer": optax.sgd(0.1),
        "has_aux": True,
        "shuffle": None,
    }
    return eqaccum.fit(jnp.float32(0.0), data, **(arguments | more))


def rows(result: eqaccum.FitResult) -> list[list[int]]:
    """Which rows each batch had, read off the bits."""
    return [
        [row for row in range(ROWS) if int(total) >> row & 1]
        for total in result.history["rows"]
    ]


IN_ORDER = [list(range(i, min(i + 4, ROWS))) for i in range(0, ROWS, 4)]


def same(one: eqaccum.FitResult, other: eqaccum.FitResult) -> None:
    assert rows(one) == rows(other)
    np.testing.assert_array_equal(one.history["loss"], other.history["loss"])
    np.testing.assert_array_equal(one.model, other.model)


# --- workers ----------------------------------------------------------------------


class Slow:
    """Waits for each example, and notes how many are being read at once."""

    def __init__(self, broken: int | None = None):
        self.broken = broken
        self.lock = threading.Lock()
        self.now = self.most = 0

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.005)
        with self.lock:
            self.now -= 1
        if index == self.broken:
            raise OSError(f"example {index} is gone")
        return Y[index], int(BITS[index])


def test_workers_read_the_same_examples_several_at_once():
    alone, helped = Slow(), Slow()
    arguments: dict[str, Any] = {"global_batch": 11, "microbatch": 11, "epochs": 2}
    one = fit(eqaccum.data.examples(alone), **arguments)
    same(fit(eqaccum.data.examples(helped, workers=4), **arguments), one)
    assert alone.most == 1
    assert 1 < helped.most <= 4
    # Nobody is left behind.
    assert not [t for t in threading.enumerate() if "eqaccum-data" in t.name]


def test_what_a_worker_meets_is_the_users_own_error():
    data = eqaccum.data.examples(Slow(broken=13), workers=3)
    with pytest.raises(OSError, match="example 13 is gone") as caught:
        fit(data, shuffle=False)
    assert caught.value.result.train.step == 3
    with pytest.raises(eqaccum.InputError, match="workers=-1.*number of threads"):
        eqaccum.data.examples(Slow(), workers=-1)
    with pytest.raises(eqaccum.InputError, match=r"workers='8' \(str\)"):
        eqaccum.data.examples(Slow(), workers="8")


# --- iterators that can say where they are ----------------------------------------


class Places:
    """Items of five rows; its iterators have Grain's protocol, and count what is read.

    `form` is what a state looks like.
    """

    def __init__(self, form=lambda number: {"next_index": number}):
        self.form, self.read = form, []

    def __iter__(self):
        return PlacesIterator(self)


class PlacesIterator:
    def __init__(self, of: Places):
        self.of, self.number = of, 0

    def __iter__(self):
        return self

    def __next__(self):
        start = 5 * self.number
        if start >= ROWS:
            raise StopIteration
        self.of.read.append(self.number)
        self.number += 1
        return Y[start : start + 5], BITS[start : start + 5]

    def get_state(self):
        return self.of.form(self.number)

    def set_state(self, state):
        for number in range(10):
            if self.of.form(number) == state:
                self.number = number
                return
        raise ValueError(state)


FORMS = {
    "a dict": lambda number: {"next_index": number},
    "bytes": lambda number: bytes([number, 255]),
}


@pytest.mark.parametrize(
    "form, steps", [("a dict", 1), ("a dict", 4), ("bytes", 6), ("bytes", 7)]
)
def test_a_resumed_run_goes_to_its_place(form, steps, tmp_path):
    whole = fit(Places(), epochs=2)
    assert rows(whole) == IN_ORDER * 2
    fit(Places(FORMS[form]), steps=steps, checkpoint=tmp_path)
    data = Places(FORMS[form])
    result = fit(data, epochs=2, checkpoint=tmp_path, resume=True)
    same(result, whole)
    # Item 0 is looked at for the plan; then comes the one that holds the last row used,
    # in epoch 0 or 1, and no item before it.
    used = len(sum(IN_ORDER[: steps % 6 or 6], []))
    left = list(range((used - 1) // 5, 5))
    assert data.read == [0, *left, *(range(5) if steps <= 6 else ())]


def test_an_iterator_itself_can_go_on(tmp_path):
    whole = fit(Places())
    fit(iter(Places()), steps=2, checkpoint=tmp_path)
    same(fit(iter(Places()), checkpoint=tmp_path, resume=True), whole)


def test_a_state_that_is_no_text_is_read_past(tmp_path):
    def form(number):
        return number, object

    whole = fit(Places(form), epochs=1)
    fit(Places(form), steps=3, checkpoint=tmp_path)
    data = Places(form)
    same(fit(data, epochs=1, checkpoint=tmp_path, resume=True), whole)
    assert data.read[:3] == [0, 1, 2]  # from the start, as a plain loader


# --- Grain --------------------------------------------------------------------------


def grain_dataset(grain: Any) -> Any:
    return grain.MapDataset.range(ROWS).map(lambda i: (Y[i], int(BITS[i])))


def test_a_grain_map_dataset_is_a_data_set():
    grain = pytest.importorskip("grain")
    result = fit(grain_dataset(grain), epochs=2)
    same(result, fit((Y, BITS), epochs=2))
    # Grain's own shuffle is a data set in another order.
    shuffled = grain_dataset(grain).seed(3).shuffle()
    order = [int(np.log2(shuffled[i][1])) for i in range(ROWS)]
    in_order = fit(shuffled, shuffle=False)
    assert rows(in_order) == [sorted(order[i : i + 4]) for i in range(0, ROWS, 4)]


def test_a_grain_map_dataset_without_an_end_is_refused():
    grain = pytest.importorskip("grain")
    with pytest.raises(eqaccum.InputError, match="repeat"):
        fit(grain_dataset(grain).repeat())


def test_a_grain_iter_dataset_is_resumed_at_its_place(tmp_path):
    grain = pytest.importorskip("grain")
    read: list[int] = []

    def noted(i):
        read.append(int(i))
        return Y[i], int(BITS[i])

    def data():
        ranged = grain.MapDataset.range(ROWS).seed(7).shuffle().map(noted)
        return ranged.to_iter_dataset(grain.ReadOptions(num_threads=0)).batch(3)

    whole = fit(data(), epochs=2)
    assert rows(whole)[0] != IN_ORDER[0]
    fit(data(), steps=4, checkpoint=tmp_path)
    read.clear()
    same(fit(data(), epochs=2, checkpoint=tmp_path, resume=True), whole)
    # 3 for the plan, then from the 16th on, and the second epoch whole.
    assert len(read) == 3 + (ROWS - 15) + ROWS


# --- torch --------------------------------------------------------------------------


def torch_dataset(torch: Any) -> Any:
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, index):
            return torch.tensor(Y[index]), torch.tensor(int(BITS[index]))

    return Rows()


def test_a_torch_dataset_is_a_data_set():
    torch = pytest.importorskip("torch")
    columns = fit((Y, BITS), epochs=2)
    same(fit(torch_dataset(torch), epochs=2), columns)
    tensors = torch.utils.data.TensorDataset(torch.tensor(Y), torch.tensor(BITS))
    same(fit(tensors, epochs=2), columns)
    subset = torch.utils.data.Subset(tensors, list(range(ROWS)))
    same(fit(subset, epochs=2), columns)


def test_a_torch_loader_is_an_iterable():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch_dataset(torch), batch_size=5)
    result = fit(loader, epochs=2)
    assert rows(result) == IN_ORDER * 2
    same(result, fit((Y, BITS), epochs=2, shuffle=False))
    with pytest.raises(eqaccum.InputError, match="shuffle=True.*cannot be indexed"):
        fit(loader, shuffle=True)


@pytest.mark.slow
def test_a_torch_loader_with_processes_of_its_own():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(Y), torch.tensor(BITS)),
        batch_size=5,
        num_workers=2,
        multiprocessing_context="spawn",  # JAX has threads, which a fork would lose
    )
    assert rows(fit(loader)) == IN_ORDER


def test_a_shuffling_torch_loader_gives_each_row_once_per_epoch():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(
        torch_dataset(torch),
        batch_size=5,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    batches = rows(fit(loader, epochs=2))
    first, second = batches[:6], batches[6:]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(ROWS))
    assert first != second


def test_a_torch_iterable_dataset_is_an_iterable():
    torch = pytest.importorskip("torch")

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            for start in range(0, ROWS, 7):
                yield torch.tensor(Y[start : start + 7]), BITS[start : start + 7]

    assert rows(fit(Batches(), epochs=2)) == IN_ORDER * 2


# --- Hugging Face -------------------------------------------------------------------


def test_a_hugging_face_dataset_is_a_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"y": Y, "bit": BITS}).with_format("numpy")
    columns = fit({"y": Y, "bit": BITS}, loss=named_loss, epochs=2)
    same(fit(data, loss=named_loss, epochs=2), columns)
    # One that is streamed is an iterable, batched by itself.
    streamed = data.to_iterable_dataset().batch(5).with_format("numpy")
    result = fit(streamed, loss=named_loss)
    assert rows(result) == IN_ORDER
