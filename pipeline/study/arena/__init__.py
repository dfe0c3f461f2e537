"""An arena: values of a key, such as optimizers, tuned equally and compared on fresh seeds."""
