"""SkyRL's policy worker as an actor of Ray: a driver asks for weighing, an actor is made to listen.

``skyrl_ray.py CHECKOUT``. Ray and SkyRL's modules are real; a model is not built.
"""

import os
import sys

import ray
from framework_folders import INSTALLED, PATH

from megatron_lossagg.integrations import _shared
from megatron_lossagg.integrations.skyrl import weighing_actor


def with_stand_ins():
    """Let SkyRL's worker be imported in a process of Ray's."""
    import typing

    import stand_ins
    import tiny_gpt  # noqa: F401  it lets Megatron-Core run on a CPU
    import typing_extensions

    stand_ins.install(stand_ins.of("skyrl", but=stand_ins.RAY))
    typing.TypedDict = typing_extensions.TypedDict  # SkyRL's pydantic models, before Python 3.12


def train():
    """In the trainer's task: return whether an actor listens, and SkyRL's own does."""
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper, megatron_worker

    class WithoutModel(megatron_worker.MegatronPolicyWorkerBase):
        def __init__(self):
            """Make no process group."""

        def init_model(self, name):
            """Say whether the schedule is heard."""
            schedule = megatron_model_wrapper.get_forward_backward_func
            return name, hasattr(schedule, "__wrapped__")

    actor = ray.remote(num_gpus=1)(WithoutModel)
    found = []
    for one in (weighing_actor(actor), actor):
        policy = one.options(num_gpus=0.2).remote()
        found.append(ray.get(policy.init_model.remote("a/model")))
        ray.kill(policy)
    return _shared.is_asked(), found


def main():
    paths = [*PATH, sys.argv[1], INSTALLED]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TORCHDYNAMO_DISABLE": "1"}
    ray.init(
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        runtime_env={"env_vars": environment, "worker_process_setup_hook": with_stand_ins},
    )
    os.environ[_shared.WEIGH] = "1"  # after the cluster, as on other nodes
    variables = _shared.variables()
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": variables})(train)
    print("FOUND", ray.get(task.remote()))
    ray.shutdown()


if __name__ == "__main__":
    main()
