"""Divides the text model among ranks by torch's tensor and sequence parallelism."""

from functools import partial

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hooktrain.demos.text import TextGPT


def parallelize(model: TextGPT, mesh: DeviceMesh) -> None:
    """Divide a model among the ranks of the dimension ``"tensor"`` of a mesh.

    Inside the matrices, each rank has a part of the features of all positions; between them, it
    has all features of a part of the positions (Megatron-LM, arXiv:2104.04473 and 2205.05198).

    Args:
        model: a model with ``fused=False``. The numbers of its heads and of its tokens must be
            multiples of the number of ranks.
        mesh: the mesh of :class:`hooktrain.strategy.FSDPStrategy`.
    """
    places = Shard(1)
    # DTensors know their full shape, so the number of positions need not be a multiple of the
    # number of ranks.
    to_places = partial(RowwiseParallel, output_layouts=places, use_local_output=False)
    plan = {
        "embedding": to_places(input_layouts=Replicate()),
        "blocks.*.*_norm": SequenceParallel(),
        # The input is gathered once for the three matrices.
        "blocks.*.attention_in": PrepareModuleInput(
            input_layouts=places, desired_input_layouts=Replicate()
        ),
        "blocks.*.attention_in.*": ColwiseParallel(),
        "blocks.*.attention_out": to_places(),
        "blocks.*.mlp_in": ColwiseParallel(input_layouts=places),
        "blocks.*.mlp_out": to_places(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=places, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], plan)
