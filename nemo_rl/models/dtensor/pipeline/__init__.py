"""Pipeline parallelism: layers divided into stages, microbatches passed on between them."""
