"""Whether several processes would train one model by one plan on one data set."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from dpcore.torch.doctor.finding import Findings, not_tried, of_error, ok
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.peers import is_sharded, peers_of


def examined(subject: Subject, examine: Callable[[], Findings]) -> Findings:
    """Let each process examine its own objects alone, then all together whether they agree.

    All processes must call it, as they must call `make_private`. The checks of one process send nothing to others: one
    that fails in a rank keeps no other waiting.
    """
    if is_sharded(subject.model):
        return Findings(
            [
                not_tried(
                    "model",
                    "this process has parts of the model's parameters alone.",
                    "examine the whole model in one process, before fully_shard",
                )
            ]
        )
    if not _several(subject):
        found = examine()
        found.append(
            not_tried("processes", "this is one process alone.", "start the script by torchrun to compare its ranks")
        )
        return found
    group = subject.options.pop("process_group", None)
    ranks = list(range(dist.get_world_size()))
    alone = [dist.new_group([rank]) for rank in ranks]
    subject.options["process_group"] = alone[dist.get_rank()]
    found = examine()
    subject.options["process_group"] = group
    failed = peers_of(group, subject.model).added([float(subject.private is None)])[0]
    if failed:
        found.append(
            not_tried(
                "processes",
                f"make_private refuses the objects of {failed:.0f} of {len(ranks)} processes.",
                "mend the faults that these name",
            )
        )
        return found
    subject.private = None
    subject.build()
    if subject.refused is not None:
        found.append(of_error("processes", subject.refused))
    else:
        found.append(ok("processes", f"{len(ranks)} processes have the same plan, model and data."))
    return found


def _several(subject: Subject) -> bool:
    given = subject.options.get("process_group")
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(given) > 1
