def measure(bench):
    raise NotImplementedError
def measure_distance(bench):
    raise NotImplementedError
