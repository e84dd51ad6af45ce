"""The packages of a wheel; all else stands in pyproject.toml, which cannot rename the folder of a found package."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["data_module*", "model*", "pipeline*"]), "pipeline.recipes"],
    package_dir={"pipeline.recipes": "configs"},
)
