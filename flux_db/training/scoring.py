"""Scores of the samples while training: what measures them, and rounds read from their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from flux_db.console import stage
from flux_db.data.dataset import Dataset
from flux_db.errors import UserError
from flux_db.run import sample_files
from flux_db.score.runs import open_scorer
from flux_db.score.samples import read_pictures, read_samples
from flux_db.score.scorer import Folders, Scorer, Scores, locate
from flux_db.settings.concepts import concepts_of
from flux_db.settings.derived import sample_prompts, validation_prompts, validation_size
from flux_db.settings.schema import Config


class ScoringFailed(Exception):
    """A round that cannot be scored; training goes on."""


class Scoring:
    """Scores the rounds of a run; on rank 0 only. `scored_with` says which scores can be compared."""

    def __init__(self, config: Config, dataset: Dataset, scorer: Scorer) -> None:
        validation = config.validation
        self.output = Path(config.output.output_dir)
        self.scorer = scorer
        prompts = [f"{line.text} {line.options}".strip() for line in sample_prompts(config)]
        self.count = len(prompts) * validation.num_validation_images
        about = [scorer.by, scorer.fingerprint, prompts, validation.num_validation_images, validation.validation_seed]
        about += [validation_size(config), validation.validation_inference_steps, validation.validation_guidance]
        about += [sorted({example.picture.digest for example in dataset.examples})]
        self.scored_with = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]

    def measure(self, step: int) -> Scores:
        """The scores of a round; a ScoringFailed if not all of its samples were drawn."""
        files = sample_files.read_folder(sample_files.round_folder(self.output, step))
        if len(files) < self.count:
            raise ScoringFailed(f"only {len(files)} of {self.count} samples were drawn")
        first = sample_files.read_folder(sample_files.round_folder(self.output, 0))
        with stage(f"Scoring the samples at step {step}"):
            return self.scorer.score(read_samples(files), read_samples(first))


def open_scoring(config: Config, dataset: Dataset) -> Scoring | None:
    """What scores this run, its networks loaded; None without --score_steps. MindSpore must have been started."""
    if config.validation.score_steps is None:
        return None
    folders = _locate(config)
    if not folders:
        return Scoring(config, dataset, _open(config, dataset, folders))
    with stage("Loading what scores the samples"):
        return Scoring(config, dataset, _open(config, dataset, folders))


def demand_scoring(config: Config, dataset: Dataset) -> None:
    """A UserError if samples could not be scored. Networks of the hub are fetched and looked through, not loaded."""
    if config.validation.score_steps is not None and not _locate(config):
        _open(config, dataset, Folders())


def demand_judge(config: Config, dataset: Dataset) -> None:
    """As `demand_scoring`, but without any download: a UserError if the judge is to score what it does not know."""
    validation = config.validation
    if not (validation.score_dino or validation.score_clip):
        demand_scoring(config, dataset)


def _locate(config: Config) -> Folders:
    validation = config.validation
    return locate(validation.score_dino, validation.score_clip, prefix="score_", cache_dir=config.model.cache_dir)


def _open(config: Config, dataset: Dataset, folders: Folders) -> Scorer:
    concept = concepts_of(config)[0]  # scores are of runs with one
    # by content: a picture with repeats is among the examples several times
    paths = list({example.picture.digest: example.picture.path for example in dataset.examples}.values())
    try:
        scorer = open_scorer(
            concept.prompt, concept.trigger, config.data.class_prompt, lambda: read_pictures(paths), folders
        )
        if scorer.unmeasured:
            raise UserError(scorer.unmeasured)
    except UserError as error:
        hint = "" if folders else "; for other pictures give --score_dino and --score_clip"
        raise UserError([f"--score_steps: {problem}{hint}" for problem in error.problems]) from error
    if not any(map(scorer.names_subject, validation_prompts(config))):
        raise UserError("--score_steps: no --validation_prompt names the subject, so no sample can be scored; add one")
    return scorer
