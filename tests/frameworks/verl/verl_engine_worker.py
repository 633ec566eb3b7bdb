"""verl's own MegatronEngine on CPU, DP 2 x CP 2: its step from a batch to gradients.

Real: verl's forward_backward_batch, prepare_micro_batches, forward_step, packing and gathering
over context parallelism, ppo_loss, agg_loss's callers, postprocess_micro_batch_func, and
Megatron-Core's schedule, DDP and finalize. Not real: the engine's constructor (it builds models
from Hugging Face configurations); log-probabilities, in float64 instead of Megatron's float32. The
model is on the CPU; its outputs and the batch are on a double of a device when the loss function
gets them, as on a GPU.
"""

import itertools
import os
import sys
import uuid
from functools import partial

os.environ |= {"VERL_ENGINE_VENDOR": "lossagg", "VERL_ENGINE_DEVICE": "cuda"}

import stand_ins

stand_ins.install(stand_ins.of("verl"))

import framework_step  # noqa: E402
import pytest  # noqa: E402
import tiny_gpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from device_double import DeviceDouble, OnDevice  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from ranks import leave  # noqa: E402

from megatron_lossagg.verify.drivers.verl import engine_around  # noqa: E402


def build(per_token):
    """Return the engine that verl would select, around a wrapped tiny GPT."""
    import verl.workers.engine.megatron.transformer_impl as megatron_engine
    from verl.workers.engine import EngineRegistry

    megatron_engine.get_device_id = lambda: "cpu"
    megatron_engine.vocab_parallel_log_probs_from_logits = log_probs
    megatron_engine.vocab_parallel_entropy = entropy
    engine_class = EngineRegistry.get_engine_cls("language_model", "megatron")
    assert engine_class.__module__ == "megatron_lossagg.integrations.verl"
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=per_token))
    engine = engine_around(engine_class, chunk)
    own = engine.postprocess_micro_batch_func

    def postprocess(output, *, loss_function, **more):
        return own(output, loss_function=partial(on_device, loss_function), **more)

    engine.postprocess_micro_batch_func = postprocess
    return engine, chunk


def on_device(loss_function, model_output, data, dp_group):
    """Call the loss function with everything on the double of a device."""
    output = {name: value.to(DeviceDouble.device) for name, value in model_output.items()}
    data = data.to(DeviceDouble.device)
    loss, metrics = loss_function(model_output=output, data=data, dp_group=dp_group)
    assert isinstance(loss, OnDevice)
    return loss.cpu(), metrics


def log_probs(logits, labels):
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None]).squeeze(-1)


def entropy(logits):
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def padding(length):
    """Make a padding sequence as verl's upsample_batch_to_divisible_size does."""
    one = torch.ones(1, dtype=torch.float64)
    return {
        "tokens": [1] * length,
        "response": 1,
        "mask": [0],
        "uid": f"pad{uuid.uuid4().hex}",
        "advantage": one,
        "old": -one,
        "ref": -one,
    }


def batch_of(sequences, *, num_microbatches, with_uid, odd):
    """Make this rank's batch, as the trainer gives it to update_actor, in whole microbatches."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    size = -(-len(sequences) // num_microbatches) + 1
    made = []
    for number in range(num_microbatches):
        own = sequences[number::num_microbatches]
        own = own + [padding(4) for _ in range(size - 1 - len(own))]
        tokens = sum(len(sequence["tokens"]) for sequence in own)
        made += [*own, padding(2 + (tokens + odd) % 2)]
    nested = lambda values: torch.nested.as_nested_tensor(values, layout=torch.jagged)  # noqa: E731
    whole = [torch.tensor(sequence["tokens"]) for sequence in made]
    response = [sequence["response"] for sequence in made]
    mask = [torch.tensor(sequence["mask"]) for sequence in made]
    fields = {
        "input_ids": nested(whole),
        "prompts": nested([t[: len(t) - n] for t, n in zip(whole, response, strict=True)]),
        "responses": nested([t[len(t) - n :] for t, n in zip(whole, response, strict=True)]),
        "response_mask": nested(mask),
        "loss_mask": nested(mask),
        "old_log_probs": nested([sequence["old"] for sequence in made]),
        "ref_log_prob": nested([sequence["ref"] for sequence in made]),
        "advantages": nested([sequence["advantage"] for sequence in made]),
        "temperature": torch.ones(len(made)),
    }
    batch = TensorDict(fields, batch_size=len(made))
    if with_uid:
        tu.assign_non_tensor_stack(batch, "uid", [sequence["uid"] for sequence in made])
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=size,
        global_batch_size=len(framework_step.samples()),
        calculate_entropy=True,
    )
    return batch, sum(len(sequence["tokens"]) for sequence in made)


def actor_config(loss_mode):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        loss_scale_factor=framework_step.L,
        use_kl_loss=True,
        kl_loss_coef=framework_step.KL,
        entropy_coeff=framework_step.ENTROPY,
    )


def compare(path, per_token):
    tiny_gpt.start(cp=2)
    saved = framework_step.expected_cases(path)
    import verl.workers.utils.losses as losses

    engine, chunk = build(per_token)
    dp_rank = parallel_state.get_data_parallel_rank()
    sequences = framework_step.samples()[dp_rank::2]
    for case, aggregation in framework_step.CASES.items():
        if case == "length_power":  # verl has no name for its exponent
            continue
        name = f"lossagg_{aggregation.mode}{'' if aggregation.count_empty else '_no_count_empty'}"
        loss_function = partial(losses.ppo_loss, config=actor_config(name))
        _, grads = saved[case, "pg kl entropy"]
        for m in (1, 3):
            for odd in (0, 1):
                if odd and not (per_token and case == "constant"):
                    continue
                batch, _ = batch_of(sequences, num_microbatches=m, with_uid=True, odd=odd)
                chunk.zero_grad_buffer()
                with DeviceDouble():
                    output = engine.forward_backward_batch(batch, loss_function)
                worst = framework_step.worst_error(chunk, grads)
                assert worst < 1e-12, (case, worst)
                if not odd:
                    check_report(output, saved, case)
                if dist.get_rank() == 0:
                    tokens = "odd" if odd else "even"
                    print(f"{case}, M = {m}, {tokens}: the reference, {worst:.1e}", flush=True)
    batch, _ = batch_of(sequences, num_microbatches=1, with_uid=False, odd=0)
    name = partial(losses.ppo_loss, config=actor_config("lossagg_prompt_mean"))
    with pytest.raises(ValueError, match="got sequences without a uid"):
        engine.forward_backward_batch(batch, name)
    grads = saved["token_mean", "pg kl entropy"][1]
    for m, odd in itertools.product((1, 3), range(1 + per_token)):
        factor = train_verls_own(engine, chunk, sequences, m, odd)
        assert (factor > 1) == odd
        assert framework_step.worst_error(chunk, grads, factor) < 1e-12
        if dist.get_rank() == 0:
            print(f"verl's own token-mean, M = {m}: {factor:.6f} times its alias")


def train_verls_own(engine, chunk, sequences, m, odd):
    """Train a mode of verl's own, which is untouched; returns its gradient over its alias's.

    verl reports floor(tokens / CP) per microbatch and rank.
    """
    import verl.workers.utils.losses as losses

    batch, tokens = batch_of(sequences, num_microbatches=m, with_uid=True, odd=odd)
    chunk.zero_grad_buffer()
    with DeviceDouble():
        config = actor_config("vanilla")
        engine.forward_backward_batch(batch, partial(losses.ppo_loss, config=config))
    counted = torch.tensor([tokens, tokens - m * odd])
    dist.all_reduce(counted, group=parallel_state.get_data_parallel_group())
    return (counted[0] / counted[1]).item()


def check_report(output, saved, case):
    """The policy loss that verl logs is the step's, summed over microbatches, mean over ranks."""
    if not parallel_state.is_pipeline_last_stage():
        return
    reported = output["metrics"]["actor/pg_loss"]
    reported = reported if isinstance(reported, list) else [reported]
    total = torch.tensor(sum(float(torch.as_tensor(v).sum()) for m in reported for v in m.values))
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    want = saved[case, "pg"][0]
    assert abs(total.item() / 2 - want) < 1e-9 * abs(want), (total.item() / 2, want)


if __name__ == "__main__":
    compare(sys.argv[1], per_token=sys.argv[2] == "1")
    leave()
