"""The startup probe: measure K on the live Megatron-Core instead of relying on the table.

A tiny chunk per virtual stage, with one weight vector w and ``out = in + sum_j w_j``, goes
through the live DDP class, schedule and finalize function. Each data- and context-parallel
rank d and microbatch m has a partial loss of its own, ``v(d, m) * out``, and returns what
:class:`~megatron_lossagg.step.MicrobatchLoss` returns for it. K is right where

    main_grad_j = sum_{d,m} v(d, m)        for every j, on every stage and rank

and elsewhere Megatron compensates for another factor, ``K * sum v / main_grad_j``, which is
reported. The probe measures factors, not rounding, so it computes in float32 for any dtype of
the model. It works on copies: the live config, model, buffers, random states and Megatron's
globals stay as they are.

``startup`` decides what to measure and remembers it, ``measure`` runs the step and compares,
``model`` is the tiny chunk, its configs and its gradients, ``together`` makes all ranks fail
alike.
"""

from megatron_lossagg.probe.startup import ProbeReport, run_probe

__all__ = ["ProbeReport", "run_probe"]
