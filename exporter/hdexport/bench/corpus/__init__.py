"""The benchmark of a whole corpus: how fast bundles and other libraries embed texts of mixed lengths, called as users
do."""
