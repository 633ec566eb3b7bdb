"""What fails a case of ``lossagg verify``: one wrong quantity, of one rank, in one of its steps."""

from conftest import each_check

judged, test_the_verdict_of_a_step = each_check("verify/verdict_worker.py", processes=2)
