"""Whether all ranks run the same, and what is said of one that does not come."""

from conftest import each_check

output, test_the_agreement = each_check("guards/agreement_worker.py", processes=3)
