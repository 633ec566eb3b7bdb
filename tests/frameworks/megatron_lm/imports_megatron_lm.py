"""What every run of a Megatron-LM script imports first; for the fork server."""

from megatron_lossagg.cpu.training import install_training

install_training()
