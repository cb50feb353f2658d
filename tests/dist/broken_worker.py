"""A rank that cannot even be imported."""

import no_such_module_at_all  # noqa: F401
