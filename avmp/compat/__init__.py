"""Drop-in names: avmp's operations under the signatures that people already call, one module per peer.

Each adapter has its peer's parameter names, order, defaults, shapes and mutation, checks, maps names and calls
``avmp.ops``. Ids are the peer's own, physical, and 0 is ordinary where it is for the peer; a ``Batch.physical()`` or
``Batch.physical_csr()`` is taken in place of the tensors, with 0 as null, and refused once a unit has moved. What is
not offered raises ``Unsupported`` and says what to use instead. As with the peers there is no backward pass, and
arguments that require gradients are taken.
"""
