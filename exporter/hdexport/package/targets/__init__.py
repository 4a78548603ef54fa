"""Systems that load a package, a file each; `hdexport.package.target.targets` finds them here."""
