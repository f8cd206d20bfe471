"""MatrixFSDP: whole matrices, sharded, with nothing to send in the optimizer step (arXiv 2607.05895)."""

from peerloom.optim.matrix_fsdp.errors import RankLost, ShardingError
from peerloom.optim.matrix_fsdp.optimizers import OwnerOptimizer, build_optimizer, clip_grad_norm_
from peerloom.optim.matrix_fsdp.planner import OwnerPlan, plan_owners
from peerloom.optim.matrix_fsdp.runtime import Owned, ShardedModel, holdings, sharding_of
from peerloom.optim.matrix_fsdp.shard import Sharing, matrix_fully_shard

__all__ = [
    "Owned",
    "OwnerOptimizer",
    "OwnerPlan",
    "RankLost",
    "ShardedModel",
    "Sharing",
    "ShardingError",
    "build_optimizer",
    "clip_grad_norm_",
    "holdings",
    "matrix_fully_shard",
    "plan_owners",
    "sharding_of",
]
