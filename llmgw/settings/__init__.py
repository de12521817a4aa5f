"""What operators write: the cluster's settings and the two daemons' own files, as types and checks."""
