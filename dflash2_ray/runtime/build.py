"""From a configuration to a running loop, in two stages: a blueprint (no weights read) and the loop itself.

The blueprint is what `dflash2-ray check` shows; building follows it to the letter.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dflash2_ray.config import DrafterFacts, EngineConfig, ServiceConfig, TargetFacts, resolve
from dflash2_ray.core.draft_port import DraftPort
from dflash2_ray.errors import CheckpointError, ConfigError
from dflash2_ray.models.dflash2 import load_context_projection, load_drafter
from dflash2_ray.models.drafter_checkpoint import validate_drafter
from dflash2_ray.models.drafter_config import DrafterConfig, read_drafter_config
from dflash2_ray.models.paged_plan import kernels_run
from dflash2_ray.models.source import locate, read_target_facts
from dflash2_ray.models.target import Target
from dflash2_ray.models.target_ends import read_target_share
from dflash2_ray.models.target_share import TargetShare
from dflash2_ray.models.tensor_files import TensorFiles
from dflash2_ray.models.tensor_parallel import Shard
from dflash2_ray.runtime.cuda_graphs import CudaBackend
from dflash2_ray.runtime.draft_link import RemoteDraftPort
from dflash2_ray.runtime.draft_rounds import DraftRounds
from dflash2_ray.runtime.drafter_runner import ColocatedDraftPort, DrafterRunner
from dflash2_ray.runtime.machine import limit_threads, read_machine_facts
from dflash2_ray.runtime.pipelined_loop import PipelinedLoop
from dflash2_ray.runtime.rank_loop import Followers
from dflash2_ray.runtime.target_loop import TargetLoop
from dflash2_ray.runtime.target_runner import TargetRunner
from dflash2_ray.runtime.verify_graphs import Limits, VerifyGraphs
from dflash2_ray.sampling.grammar import GrammarState, GrammarVocabulary
from dflash2_ray.text.generation_defaults import read_generation_defaults

logger = logging.getLogger(__name__)
Progress = Callable[[str, float, float], None]  # phase, done, total


@dataclass(frozen=True)
class Blueprint:
    """Everything that is decided before a weight is read."""

    config: EngineConfig
    target_folder: Path
    target: TargetFacts
    drafter_folder: Path | None
    drafter_config: DrafterConfig | None
    drafter: DrafterFacts | None


def draw_blueprint(config: ServiceConfig, progress: Progress | None = None) -> Blueprint:
    """Find both checkpoints, read their headers, check that they fit each other and this machine, and resolve.

    May download or convert a checkpoint that is not there yet. Raises ConfigError or CheckpointError.
    """
    target_folder = locate(config.target, config.target_revision, progress=progress)
    target = read_target_facts(target_folder)
    drafter_folder = drafter_config = drafter = None
    if config.wants_drafter:
        drafter_folder = locate(config.drafter or "embedded-drafter", config.drafter_revision, progress=progress)
        drafter_config = read_drafter_config(drafter_folder)
        validate_drafter(
            drafter_config,
            TensorFiles(drafter_folder),
            target_hidden_size=target.hidden_size,
            target_num_layers=target.num_layers,
            target_vocab_size=target.vocab_size,
            target_embedding_rows=target.vocab_size,
        )
        drafter = drafter_config.as_facts()
    resolved = resolve(config, read_machine_facts(), target, drafter)
    return Blueprint(resolved, target_folder, target, drafter_folder, drafter_config, drafter)


def build_target_loop(config: ServiceConfig, progress: Progress | None = None) -> TargetLoop:
    """Load both models and wire the step loop. Raises ConfigError or CheckpointError."""
    return build_from_blueprint(draw_blueprint(config, progress), config, progress)


def agreed(blueprint: Blueprint, shard: Shard) -> Blueprint:
    """The blueprint with what all ranks can hold: the fewest pages of any. A collective; raises ConfigError when the ranks see
    different checkpoints."""
    rows = shard.exchange([blueprint.config.num_kv_pages, blueprint.target.weight_bytes, blueprint.target.num_layers])
    if any(row[1:] != rows[0][1:] for row in rows):
        raise ConfigError(
            f"target: ranks see different checkpoints (weight bytes, layers): {[row[1:] for row in rows]}"
        )
    return replace(blueprint, config=replace(blueprint.config, num_kv_pages=min(row[0] for row in rows)))


def load_target(blueprint: Blueprint, shard: Shard | None = None, progress: Progress | None = None) -> Target:
    """One rank's part of the target, with the drafter's taps. Raises CheckpointError."""
    limit_threads()
    return Target.load(
        blueprint.target_folder,
        dtype=blueprint.config.dtype,
        device=blueprint.config.device,
        taps=blueprint.drafter_config.taps if blueprint.drafter_config else (),
        progress=(lambda done, total: progress("load target", done, total)) if progress else None,
        shard=shard,
    )


def build_from_blueprint(
    blueprint: Blueprint,
    config: ServiceConfig,
    progress: Progress | None = None,
    *,
    shard: Shard | None = None,
    followers: Followers | None = None,
) -> TargetLoop:
    """Load what the blueprint names and wire the loop, on rank 0 of `shard.size` ranks: the serial one, or the pipelined one for
    a separate drafter."""
    blueprint = agreed(blueprint, shard or Shard())
    engine = blueprint.config
    target = load_target(blueprint, shard, progress)
    projection = None
    port: DraftPort | None = None
    if blueprint.drafter_config is not None and engine.num_speculative_tokens > 0:
        if blueprint.drafter_folder is None:
            raise CheckpointError("drafter: a configuration without a folder")
        if progress:
            progress("load drafter", 0, 1)
        projection = load_context_projection(
            blueprint.drafter_folder, blueprint.drafter_config, engine.dtype, engine.device
        )
        if engine.drafter_placement == "separate":
            port = RemoteDraftPort()  # the loop says how long it waits where that is fixed
        else:
            share = target.share() if target.shard.size == 1 else None
            port = ColocatedDraftPort(build_drafter_runner(blueprint, share))
        if progress:
            progress("load drafter", 1, 1)
    defaults = read_generation_defaults(blueprint.target_folder, config.generation_config)
    vocabulary = GrammarVocabulary(
        blueprint.target_folder / "tokenizer.json", blueprint.target.vocab_size, defaults.eos_token_ids
    )
    runner = TargetRunner(
        target,
        projection,
        num_pages=engine.num_kv_pages,
        page_size=engine.page_size,
        followers=followers,
        grammars=functools.partial(GrammarState, vocabulary),
    )
    if (
        engine.cuda_graphs and target.shard.size == 1 and kernels_run(torch.device(engine.device))
    ):  # one rank decides alone what it runs
        limits = Limits(engine.max_num_seqs, engine.num_speculative_tokens + 1, engine.max_model_len, engine.page_size)
        runner.verify_graphs = VerifyGraphs(target, projection, runner.cache, limits, CudaBackend())
    loop_class = TargetLoop if engine.pipeline == "serial" else PipelinedLoop
    return loop_class(
        engine,
        runner,
        port,
        eos_token_ids=frozenset(defaults.eos_token_ids),
        vocab_size=blueprint.target.vocab_size,
    )


def build_drafter_runner(blueprint: Blueprint, share: TargetShare | None = None) -> DrafterRunner:
    """The drafter. Without a `share` of a target that is loaded here it reads the target's embedding and head itself.
    Raises CheckpointError."""
    limit_threads()
    if blueprint.drafter_folder is None or blueprint.drafter_config is None:
        raise CheckpointError("drafter: expected a blueprint with a drafter, got one without")
    engine = blueprint.config
    if share is None:
        share = read_target_share(blueprint.target_folder, dtype=engine.dtype, device=engine.device)
    drafter = load_drafter(
        blueprint.drafter_folder, blueprint.drafter_config, share, dtype=engine.dtype, device=engine.device
    )
    rounds = None
    if kernels_run(torch.device(engine.device)):
        block = engine.num_speculative_tokens + 1
        scratch = engine.max_num_seqs * -(
            -block // engine.page_size
        )  # a block's own rows, behind what the target holds pages for
        rounds = DraftRounds(
            drafter,
            drafter.new_pages(engine.num_kv_pages + scratch, engine.page_size),
            max_num_requests=engine.max_num_seqs,
            num_block_rows=block,
            num_positions=min(engine.max_model_len + block, engine.drafter_max_model_len),
            backend=CudaBackend() if engine.cuda_graphs else None,
        )
    return DrafterRunner(drafter, max_num_requests=engine.max_num_seqs, rounds=rounds)
