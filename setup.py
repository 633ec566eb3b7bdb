"""Metadata of megatron_lossagg; build system and tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "megatron_lossagg/__init__.py").read_text(), re.MULTILINE
)
assert VERSION is not None

setup(
    name="megatron-lossagg",
    version=VERSION.group(1),
    description="The loss you configured is the loss you train, on any Megatron layout.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="megatron, reinforcement learning, loss aggregation, GRPO, DAPO",
    packages=find_packages(include=["megatron_lossagg", "megatron_lossagg.*"]),
    package_data={"megatron_lossagg": ["py.typed", "templates/*.html"]},
    python_requires=">=3.10",
    entry_points={
        "console_scripts": ["lossagg = megatron_lossagg.cli.main:main"],
        # verl takes the attribute of each in every process that imports it.
        "verl.plugins": ["megatron_lossagg = megatron_lossagg.integrations.verl:plugin"],
    },
    # Small and loose: frameworks bring their own torch and Megatron.
    install_requires=["torch>=2.6", "numpy>=1.26", "rich>=13"],
    extras_require={
        "megatron": ["megatron-core>=0.13"],
        # Cannot be imported without CUDA.
        "te": ["transformer-engine[pytorch]>=2.9"],
        "docs": ["latex2mathml", "mkdocs", "mkdocs-material", "mkdocstrings[python]", "ruff"],
        # lossagg verify --html
        "report": ["jinja2"],
        # lossagg plot, lossagg explain --lengths-file; a Parquet file needs pyarrow too.
        "plot": ["jinja2", "matplotlib", "pandas>=2"],
        "parquet": ["pyarrow"],
        # lossagg plot --tokenizer
        "tokenizers": ["tokenizers"],
        # Runs examples/which_mode.ipynb as Jupyter does.
        "notebook": ["ipykernel", "jinja2", "matplotlib", "nbclient", "pandas>=2"],
        "demo": ["megatron-core>=0.13", "matplotlib", "tensorboard", "tqdm"],
        "dev": [
            "einops",
            "hypothesis",
            "jinja2",
            "libcst",
            "matplotlib",
            "mutmut",
            "mypy",
            "pandas>=2",
            "pyarrow",
            "pytest",
            "pyyaml",
            "ruff",
            "tensorboard",
            "tqdm",
        ],
    },
)
