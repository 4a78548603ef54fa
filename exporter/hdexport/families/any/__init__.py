"""Models whose type no family has: facts are found, code is traced as it is, and answers are proved."""
