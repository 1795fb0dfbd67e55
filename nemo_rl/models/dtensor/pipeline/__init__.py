"""Pipeline parallelism: layers are divided into stages, and each microbatch goes through the stages in order."""
