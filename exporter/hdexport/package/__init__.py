"""A bundle as the files that another system loads: `hdexport.package.write`, behind ``hdexport package``.

Each file of ``targets/`` is a system. A package is run by the system's own rules before it is published, and its
outputs are compared with the bundle's.
"""
