"""MatrixFSDP: whole matrices, sharded, with nothing to send in the optimizer step (arXiv 2607.05895)."""

from peerloom.optim.matrix_fsdp.errors import RankLost, ShardingError
from peerloom.optim.matrix_fsdp.planner import OwnerPlan, plan_owners
from peerloom.optim.matrix_fsdp.runtime import ShardedModel, matrix_fully_shard, sharding_of

__all__ = [
    "OwnerPlan",
    "RankLost",
    "ShardedModel",
    "ShardingError",
    "matrix_fully_shard",
    "plan_owners",
    "sharding_of",
]
