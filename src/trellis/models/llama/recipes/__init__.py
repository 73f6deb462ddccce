"""Runs of Llamas: small ones, large ones on GPUs, on TPUs, and at long sequences."""
