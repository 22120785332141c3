"""A small layer as models have it."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_qla import chunk_gated_delta_rule

HK, HV, K, V = 2, 4, 16, 8


class Layer(torch.nn.Module):
    """A small GDN layer as models have it: one projection, raw gates, a logit for beta."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(24, 2 * HK * K + HV * V + 2 * HV, bias=False)
        self.A_log = torch.nn.Parameter(torch.zeros(HV))
        self.dt_bias = torch.nn.Parameter(torch.zeros(HV))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.project(x).split([HK * K, HK * K, HV * V, HV, HV], -1)
        o, _ = chunk_gated_delta_rule(
            q.unflatten(-1, (HK, K)),
            k.unflatten(-1, (HK, K)),
            v.unflatten(-1, (HV, V)),
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )
        return o.flatten(2)
