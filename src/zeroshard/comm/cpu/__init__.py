"""Ranks on CPU: a near peer is mapped (shared memory), a far one is messaged (gloo). The control
plane of every transport, NCCL's too, lies here.
"""
