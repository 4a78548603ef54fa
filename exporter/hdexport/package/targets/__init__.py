"""Systems that load a package, a file each. `names` finds them; `hdexport.package.target.targets` imports them."""

from __future__ import annotations

import pkgutil


def names() -> dict[str, str]:
    """Names of the systems, as ``--for`` takes them -> modules: ``spring-ai`` of ``spring_ai.py``."""
    modules = sorted(each.name for each in pkgutil.iter_modules(__path__))
    return {module.replace("_js", ".js").replace("_", "-"): module for module in modules}
