"""Which buckets a run has drawn, of its loader's plan."""

from __future__ import annotations

from forebay.config.plan import BucketConfig
from forebay.config.tree import Config
from forebay.plan.cursor import LoaderState
from forebay.plan.drawn import Drawn, drawn_classes
from forebay.train.loader import Loader
from forebay.train.loop.micro_batches import BatchLoader


def drawn_by(loader: BatchLoader, config: Config) -> dict[str, Drawn]:
    """Returns what all ranks have drawn from the head of the first epoch up to where the loader stands.

    So a resumed run counts what came before, too, as if on as many ranks as now. Empty for a loader without a plan.
    """
    if not isinstance(loader, Loader):
        return {}
    end, plan = loader.state, loader.plan
    rate_hz = loader.source.constants.get("sample_rate_hz", getattr(plan, "sample_rate_hz", None))
    samples = loader.source.lengths.get("num_audio_samples")
    is_timed = rate_hz is not None and samples is not None and samples.any()
    return drawn_classes(
        plan,
        start=LoaderState(plan_key=end.plan_key, seed=end.seed, epoch=0, position=0),
        end=end,
        dp_world_size=loader.dp_world_size,
        durations_s=samples / rate_hz if is_timed else None,
        edges_s=config.plan.edges_s if is_timed and isinstance(config.plan, BucketConfig) else (),
    )
