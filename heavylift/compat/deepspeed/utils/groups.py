"""Process groups."""

from heavylift.api.process_groups import (
    get_data_parallel_group as _clone_world_group,
)
from heavylift.api.process_groups import (
    get_data_parallel_group as _get_data_parallel_group,
)
from heavylift.api.process_groups import (
    get_data_parallel_group as _get_sequence_data_parallel_group,
)
from heavylift.api.process_groups import (
    get_data_parallel_group as _get_world_group,
)
from heavylift.api.process_groups import (
    get_data_parallel_rank as _get_data_parallel_rank,
)
from heavylift.api.process_groups import (
    get_data_parallel_rank as _get_sequence_data_parallel_rank,
)
from heavylift.api.process_groups import (
    get_data_parallel_world_size as _get_data_parallel_world_size,
)
from heavylift.api.process_groups import (
    get_data_parallel_world_size as _get_sequence_data_parallel_world_size,
)
from heavylift.api.process_groups import (
    get_local_group as _get_expert_parallel_group,
)
from heavylift.api.process_groups import (
    get_local_group as _get_model_parallel_group,
)
from heavylift.api.process_groups import (
    get_local_group as _get_sequence_parallel_group,
)
from heavylift.api.process_groups import (
    get_one as _get_expert_parallel_world_size,
)
from heavylift.api.process_groups import (
    get_one as _get_model_parallel_world_size,
)
from heavylift.api.process_groups import (
    get_one as _get_sequence_parallel_world_size,
)
from heavylift.api.process_groups import (
    get_zero as _get_model_parallel_rank,
)
from heavylift.api.process_groups import (
    get_zero as _get_sequence_parallel_rank,
)

__all__ = [
    "_clone_world_group",
    "_get_data_parallel_group",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_expert_parallel_group",
    "_get_expert_parallel_world_size",
    "_get_model_parallel_group",
    "_get_model_parallel_rank",
    "_get_model_parallel_world_size",
    "_get_sequence_data_parallel_group",
    "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "_get_world_group",
]
