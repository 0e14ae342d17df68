"""What the tests of sharded training share: a pool of rank processes, tiny models, the plain loop to compare with."""
