"""The startup probe: measure K on the live Megatron-Core instead of relying on the table.

A tiny chunk per virtual stage, with one weight vector w and ``out = in + sum_j w_j``, goes
through the live DDP class, schedule and finalize function. Each data- and context-parallel
rank d and microbatch m has a partial loss of its own, ``v(d, m) * out``, and returns what
:class:`~megatron_lossagg.reduction.microbatch.Microbatch` returns for it. K is right if

    main_grad_j = sum_{d,m} v(d, m)        for every j, on every stage and rank

and elsewhere Megatron compensates for a different K, ``K * sum v / main_grad_j``, which is
reported. The probe measures K, not rounding, so it computes in float32 for any dtype of the model.
It works on copies: the live config, model, buffers, random states and Megatron's globals stay as
they are.

``startup`` runs the live parts and reports what was found, ``probe_step`` is the step and its true
gradient, ``probe_model`` the tiny chunk and its configs, ``all_ranks`` makes all ranks fail alike.
"""

from megatron_lossagg.loop.probe.startup import ProbeReport, run_probe

__all__ = ["ProbeReport", "run_probe"]
