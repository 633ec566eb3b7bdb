"""A pytest plugin, loaded first: the frameworks import ray and others when they are imported."""

import stand_ins

stand_ins.install(
    stand_ins.RAY,
    stand_ins.HYDRA,
    stand_ins.DATA,
    stand_ins.ENGINES,
    stand_ins.SERVERS,
    stand_ins.FORMATS,
)
