def measure(bench):
    raise NotImplementedError
