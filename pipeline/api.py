"""The Python API: load a trained model and use it, or train one. `import pipeline` gives these names."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray

from data_module.errors import InputError, printable
from data_module.system.files import PlainValues, user_path
from data_module.system.text_files import progress_bar
from model.attention_maps import attention_maps
from model.beyond.sampling import Sampling, check_sampling
from model.transformer import PaddedTransformer
from pipeline.checkpointing.checkpoint import load_model
from pipeline.config.recipe import recipe_from_dict
from pipeline.inference.loading import load_translator
from pipeline.inference.options import BY_RECIPE, SearchOptions
from pipeline.inference.pieces import encode_sources
from pipeline.inference.scoring import score_targets
from pipeline.inference.text_io import Defects, SentenceWarnings
from pipeline.inference.translator import Hypothesis, Translator
from pipeline.runtime import signals
from pipeline.runtime.console import lightning_noise_restored, report, user_message

if TYPE_CHECKING:
    from PIL.Image import Image


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    """Convert a user's mistake to an InputError with the line that a command would print."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        line = user_message(error)
        if line is None:
            raise
        raise InputError(line) from error


class _File(NamedTuple):
    """A checkpoint file and its identity, which differs if another file takes its place."""

    path: Path
    identity: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> "_File":
        status = path.stat()
        return cls(path, (status.st_ino, status.st_size, status.st_mtime_ns))


def load(
    path: str | Path,
    *,
    beam_size: int | None = None,
    length_penalty: float | None = None,
    stop_rule: str | None = None,
) -> "Model":
    """Load a model, on the GPU if there is one, and print on standard error which file was chosen.

    Args:
        path: a run folder, a checkpoint, or an exported bundle that has `model.ts`. That file is a program: load
            only bundles that you trust.
        beam_size: number of open hypotheses; None for the value in the recipe.
        length_penalty: exponent alpha of the length penalty; None for the value in the recipe.
        stop_rule: when a search stops, "exact" or "first"; None for the value in the recipe.

    Raises:
        InputError: the model cannot be read, or a setting is out of bounds.
    """
    with _mistakes_in_one_line():
        options = SearchOptions(beam_size, length_penalty, stop_rule)
        translator = load_translator(user_path(path))
        return Model(translator, options, _File.of(Path(translator.name).absolute()))


@dataclass(frozen=True, repr=False)
class Attention:
    """Attention weights of one sentence and its translation. Rows sum to one.

    The axes of an array are layers, heads, queries and keys. S is the number of source pieces, T that of target pieces,
    both with the end symbol.
    """

    source: list[str]
    """Source pieces, S with the end symbol. U+2581 in a piece stands for a space."""
    target: list[str]
    """Target pieces, T with the end symbol."""
    encoder: NDArray[np.float32]
    """[layers, heads, S, S]: from each source piece to each source piece."""
    decoder: NDArray[np.float32]
    """[layers, heads, T, T]: when predicting each target piece, to the begin symbol and the pieces before it."""
    cross: NDArray[np.float32]
    """[layers, heads, T, S]: when predicting each target piece, to each source piece."""
    bos: str
    """The begin symbol."""

    def __repr__(self) -> str:
        return f"<Attention: {len(self.source)} source pieces, {len(self.target)} target pieces>"

    def picture(self, kind: Literal["cross", "encoder", "decoder"] = "cross", layer: int = -1) -> "Image":
        """Draw the heads of one layer as an image of Pillow, which a notebook shows.

        Args:
            kind: which attention.
            layer: counted from 0, or from the end if it is negative.

        Raises:
            InputError: there is no such kind or layer.
        """
        from pipeline.monitoring.attention_images import AXES, axis_labels, draw_attention  # Pillow

        if kind not in AXES:
            raise InputError(f"kind {kind!r}: must be {', '.join(sorted(AXES))}")
        weights = getattr(self, kind)
        if not -len(weights) <= layer < len(weights):
            raise InputError(f"layer {layer}: there are {len(weights)}; give one from 0 to {len(weights) - 1}")
        labels = axis_labels(self.source[:-1], self.target[:-1], self.bos, self.source[-1])
        return draw_attention(kind, weights, labels, [layer % len(weights)], range(weights.shape[1]), "")


class _Options(TypedDict, total=False):
    """Named arguments of `Model.translate`, for type checkers."""

    sample: Sampling | None
    target_prefix: str | list[str] | None
    progress: bool


class Model:
    """A trained model, which `load` returns."""

    def __init__(
        self, translator: Translator, options: SearchOptions = BY_RECIPE, checkpoint: _File | None = None
    ) -> None:
        """The network is read from `checkpoint` if the search does not hold one."""
        self._translator = translator
        self._options = options
        self._settings = options.in_place_of(translator.settings)
        self._checkpoint = checkpoint

    def __repr__(self) -> str:
        return f"<Model {self._translator.name}>"

    @property
    def recipe(self) -> PlainValues:
        """The recipe that the model was trained with."""
        return self._translator.recipe

    @cached_property
    def _network(self) -> Any:
        """The network for padded batches, in evaluation mode, on the search's device."""
        search = self._translator.search
        if hasattr(search, "network"):
            return search.network
        # The compiled search has a copy of the weights only, in a layout of its own.
        assert self._checkpoint is not None
        if _File.of(self._checkpoint.path) != self._checkpoint:
            raise InputError(f"{self._checkpoint.path}: has changed since it was loaded; load it again")
        return PaddedTransformer(load_model(self._checkpoint.path).network.to(self._translator.device))

    @overload
    def translate(self, sentences: str, **options: Unpack[_Options]) -> str: ...
    @overload
    def translate(self, sentences: list[str], **options: Unpack[_Options]) -> list[str]: ...
    @overload
    def translate(self, sentences: str, n_best: int, **options: Unpack[_Options]) -> list[Hypothesis]: ...
    @overload
    def translate(self, sentences: list[str], n_best: int, **options: Unpack[_Options]) -> list[list[Hypothesis]]: ...
    def translate(
        self,
        sentences: str | list[str],
        n_best: int | None = None,
        *,
        sample: Sampling | None = None,
        target_prefix: str | list[str] | None = None,
        progress: bool = True,
    ) -> Any:
        """Translate a sentence or a list of sentences. An empty sentence has an empty translation.

        Warns of sentences that are too long for the model, without a prefix that it needs, with characters or
        pieces that it has never seen, or with U+2581, which is read as a space.

        Args:
            sentences: one sentence or a list.
            n_best: number of hypotheses for each sentence, at most the beam size, or 1 with `sample`.
            sample: draw each translation at random; the draw depends on the seed and on the number of the sentence in
                the list, counted from 1. None to search for the best translation.
            target_prefix: the text that each translation begins with, or a list of such texts, one per sentence, some
                of which may be empty; None if translations may begin with anything.
            progress: show a progress bar on standard error, after two seconds.

        Returns:
            The translation of each sentence; with `n_best`, a list of hypotheses with scores, best first.

        Raises:
            InputError: `n_best` or a setting of `sample` is out of bounds, a sentence is not text, or a target prefix
                cannot begin a translation.
        """
        texts = _texts(sentences, "sentences")
        count, beam_size = 1 if n_best is None else n_best, self._settings.beam_size
        if sample is not None:
            _check_sample(sample)
            if count > 1:
                raise InputError(f"n_best {count}: sampling draws one translation of a sentence; omit n_best or sample")
        if count < 1:
            raise InputError(f"n_best {count}: must be 1 or more")
        if count > beam_size:
            raise InputError(f"n_best {count}: is more than the beam, {beam_size}; load it with a larger beam_size")
        prefixes = None
        if target_prefix is not None:
            given = [target_prefix] * len(texts) if isinstance(target_prefix, str) else target_prefix
            prefixes = _texts(given, "target_prefix")
            if len(prefixes) != len(texts):
                raise InputError(f"{len(texts)} sentences and {len(prefixes)} target prefixes; give one for each")
        with _mistakes_in_one_line(), progress_bar("translating", len(texts), show=progress) as bar:
            options = replace(self._options, n_best=count, sampling=sample)
            translations = self._translator.translate(texts, options, target_prefixes=prefixes, finished=bar.update)
        self._warn([translation.defects for translation in translations])
        answers = [translation.text if n_best is None else translation.hypotheses for translation in translations]
        return answers[0] if isinstance(sentences, str) else answers

    @overload
    def score(self, sources: str, targets: str, *, progress: bool = True) -> Hypothesis: ...
    @overload
    def score(self, sources: list[str], targets: list[str], *, progress: bool = True) -> list[Hypothesis]: ...
    def score(self, sources: str | list[str], targets: str | list[str], *, progress: bool = True) -> Any:
        """Score given translations by teacher forcing: the model's probability of each of them, piece by piece.

        A target's score equals that of `translate` if the search has found the same pieces.

        Args:
            sources: one source sentence or a list.
            targets: its translation, or a list of as many translations.
            progress: show a progress bar on standard error, after two seconds.

        Returns:
            For each pair, the target with its log-probability, its score, which is the log-probability divided by the
            length penalty, and its number of pieces.

        Raises:
            InputError: there are not as many targets as sources, a target is too long for the model, or the weights
                are not finite.
        """
        given, wanted = _texts(sources, "sources"), _texts(targets, "targets")
        if isinstance(sources, str) != isinstance(targets, str) or len(given) != len(wanted):
            raise InputError(f"{len(given)} sources and {len(wanted)} targets; give one target for each source")
        source_ids, target_ids, translator = self._source_ids(given), self._target_ids(wanted), self._translator
        with _mistakes_in_one_line(), progress_bar("scoring", len(given), show=progress) as bar:
            alpha = self._settings.length_penalty
            scored, _ = score_targets(translator, self._network, source_ids, target_ids, wanted, alpha, bar.update)
        return scored[0] if isinstance(sources, str) else scored

    def pieces(self, sentence: str, target: str | None = None) -> list[tuple[str, float]]:
        """Return the pieces of a translation, each with its natural log-probability given the pieces before it.

        The last piece is the end symbol. The sum of these values is the log-probability that `score` or `translate`
        gives. U+2581 in a piece stands for a space. An empty sentence has no pieces.

        Args:
            sentence: the source sentence.
            target: the translation; None for the model's own, with the pieces of its search.

        Raises:
            InputError: the target is too long for the model, or the weights are not finite.
        """
        source_ids, target_ids = self._ids_of_one(sentence, target)
        with _mistakes_in_one_line():
            return score_targets(self._translator, self._network, source_ids, target_ids, [""], 0.0)[1][0]

    def attention(self, sentence: str, target: str | None = None) -> Attention:
        """Return the attention weights of a sentence while the model writes a translation.

        Args:
            sentence: the source sentence.
            target: the translation; None for the model's own.

        Raises:
            InputError: the model is a bundle, which does not give its attention weights, or the target is too long.
        """
        translator = self._translator
        with _mistakes_in_one_line():
            network = self._network
        if not isinstance(network, PaddedTransformer):
            raise InputError(f"{translator.name}: a bundle has no attention weights; load the checkpoint")
        [source_ids], [target_ids] = self._ids_of_one(sentence, target)
        tokenizer, device = translator.tokenizer, translator.device
        maps = attention_maps(
            network.network,
            torch.tensor([source_ids], device=device),
            torch.tensor([[tokenizer.bos_id, *target_ids[:-1]]], device=device),
        )
        arrays = {kind: torch.cat(layers).float().cpu().numpy() for kind, layers in maps.items()}
        pieces = tokenizer.pieces()
        return Attention(
            source=[pieces[piece_id] for piece_id in source_ids],
            target=[pieces[piece_id] for piece_id in target_ids],
            bos=pieces[tokenizer.bos_id],
            **arrays,
        )

    def _ids_of_one(self, sentence: str, target: str | None) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids of a sentence and of its translation, which is the model's own if `target` is None."""
        for text in (sentence, "" if target is None else target):
            if not isinstance(text, str):
                raise InputError(f"sentence and target: give one text each, not {text!r}")
        source_ids = self._source_ids(_texts(sentence, "sentence"))
        if target is not None:
            return source_ids, self._target_ids(_texts(target, "target"))
        with _mistakes_in_one_line():
            [translation] = self._translator.translate([sentence], self._options)
        return source_ids, [list(translation.ids) or [self._translator.tokenizer.eos_id]]

    def _source_ids(self, sentences: list[str]) -> list[list[int]]:
        """Return ids with the end symbol, cut as in translation, with the same warnings."""
        translator = self._translator
        limits = translator.max_source_tokens, translator.prefixes
        rows, defects = encode_sources(translator.tokenizer, sentences, *limits)
        self._warn(defects)
        return rows

    def _target_ids(self, sentences: list[str]) -> list[list[int]]:
        """Return ids with the end symbol; raise InputError for a sentence longer than the network's positions."""
        longest = self._translator.search.max_positions
        rows, defects = encode_sources(self._translator.tokenizer.target, sentences)
        self._warn(defects)
        for number, ids in enumerate(rows, 1):
            if longest and len(ids) > longest:
                raise InputError(f"target {number}: has {len(ids)} pieces and the network {longest} positions; cut it")
        return rows

    def _warn(self, defects: list[Defects]) -> None:
        """Warn of sentences by number, from 1; the warnings point to the code that called this module."""
        found = SentenceWarnings(self._translator.prefixes, self._translator.max_source_tokens)
        for number, of_sentence in enumerate(defects, 1):
            found.add(number, of_sentence)
        level, frame = 1, inspect.currentframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            level, frame = level + 1, frame.f_back
        for text in found.texts("sentence"):
            warnings.warn(printable(text), stacklevel=level)


def _check_sample(sample: Sampling) -> None:
    if not isinstance(sample, Sampling):
        raise InputError(f"sample {sample!r}: give a pipeline.Sampling, such as pipeline.Sampling(temperature=0.7)")
    for name, value in sample._asdict().items():
        # Classes that include NumPy's numbers.
        kind, what = (Real, "a number") if name in ("temperature", "top_p") else (Integral, "a whole number")
        if isinstance(value, bool) or not (isinstance(value, kind) or (name == "top_k" and value is None)):
            raise InputError(f"sample: {name} {value!r} must be {what}")
    try:
        check_sampling(sample)
    except ValueError as error:
        raise InputError(f"sample: {error}") from None


def _texts(given: str | list[str], name: str) -> list[str]:
    """Return a list of sentences; raise InputError for a member that is not text or has no UTF-8 form."""
    texts = [given] if isinstance(given, str) else list(given)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise InputError(f"{name}: number {number} is {text!r}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start].encode("ascii", "backslashreplace").decode()
            raise InputError(
                f"{name}: number {number} has half of a surrogate pair, {half}, which is no character; remove it"
            ) from None
    return texts


def train(recipe: Mapping[str, object]) -> Path:
    """Train a model as `fit` does: prepare the corpus if necessary, and start the run or resume it.

    The process keeps its signal handlers, warning filters and random state. A keyboard interrupt saves a checkpoint
    before it is raised; the same call then resumes.

    Args:
        recipe: a dictionary with the keys of a recipe file and its name. It is not changed.

    Returns:
        The run folder, for `load`. The run may have stopped before its last step if `trainer.max_time` has passed.

    Raises:
        InputError: a mistake in the recipe or its text, with which `fit` would end as well.
        KeyboardInterrupt: after the checkpoint is saved.
    """
    # Lightning, which translating does not need
    from pipeline.doctor.recipe_checks import checked_folder
    from pipeline.fit import fit

    with _mistakes_in_one_line(), _state_restored():
        checked = recipe_from_dict(recipe)
        try:
            with checked_folder(checked, fresh=False) as folder:
                fit(checked, folder, fresh=False, init_from=None)
        except signals.Stopped as stop:
            if signals.first_signal() is not None:
                raise KeyboardInterrupt(str(stop)) from None
            report(stop)
        except SystemExit:  # by Lightning, on a KeyboardInterrupt
            raise KeyboardInterrupt from None
    return checked.run_folder()


@contextmanager
def _state_restored() -> Iterator[None]:
    """Restore the global state that training changes in this process."""
    signals.forget()
    precision = torch.get_float32_matmul_precision()
    devices = range(torch.cuda.device_count())
    try:
        with lightning_noise_restored(), torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
