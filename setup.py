"""Build the package with a README.md whose relative links are absolute, as package indexes need."""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
(repository,) = re.findall(r"git clone (\S+?)(?:\.git)?\s", readme)
readme = re.sub(r"(!\[[^]]*]\()(?![a-z]+:|#)", rf"\1{repository}/raw/main/", readme)
readme = re.sub(r"(?<=]\()(?![a-z]+:|#)", f"{repository}/blob/main/", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
