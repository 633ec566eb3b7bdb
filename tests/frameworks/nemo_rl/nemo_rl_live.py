"""NeMo-RL's own part of a step on live Megatron-Core."""

import framework_step
import live_step
import torch
from live_step import CP, padded
from nemo_rl_written import ClippedPGLossFn

from megatron_lossagg.integrations import nemo_rl


class Live(live_step.Live):
    """NeMo-RL 7ea279ab: masked_mean by global counts, / CP, * M / CP, two outputs, per token."""

    per_token = sums_gradients = True

    def __init__(self, steps, dp_size):
        super().__init__(steps, dp_size)
        whole = [sequence for rank in steps for sequence in rank]
        self.counts = {
            "global_valid_seqs": torch.tensor(float(len(whole))),
            "global_valid_toks": torch.tensor(float(sum(sum(one["mask"]) for one in whole))),
        }

    def loss(self, case, sequences, log_probs, num_microbatches):
        # A sequence-level loss for one mode, so that both of NeMo-RL's divisors are compensated.
        stock = ClippedPGLossFn(token_level=case != "constant")
        names = {"token_mask": "mask", "prev_logprobs": "old", "advantages": "advantage"}
        data = {"sample_mask": torch.ones(len(sequences))}
        for field, name in {**names, "reference_policy_logprobs": "ref"}.items():
            whole = padded([sequence[name] for sequence in sequences])
            data[field] = torch.nn.functional.pad(whole, (1, 0))
        # A sequence that NeMo-RL counts nowhere.
        data = {name: torch.cat([value, value[:1]]) for name, value in data.items()}
        data["sample_mask"][-1] = 0
        loss_fn = nemo_rl.aggregated(stock, framework_step.CASES[case])
        loss, metrics = loss_fn(padded([*log_probs, log_probs[0]]), data=data, **self.counts)
        assert abs(metrics["loss"] - loss.item()) < 1e-12
        return loss / CP * num_microbatches / CP
