import os
import socket
import sys

import pytest

from paceline.errors import LaunchError
from paceline.launch.ports import claim_port


def test_port_zero_takes_a_free_one():
    with claim_port(0, backlog=4) as one, claim_port(0, backlog=4) as two:
        assert one.getsockname()[0] == "127.0.0.1"
        assert 0 < one.getsockname()[1] != two.getsockname()[1] > 0


def test_a_port_can_be_taken_again_at_once_after_use():
    with claim_port(0, backlog=4) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
    claim_port(port, backlog=4).close()


def test_a_busy_port_names_its_holder_and_the_way_out():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            claim_port(port, backlog=4)
    message = str(caught.value)
    assert message.startswith(f"port {port} is taken by pid {os.getpid()} (")
    assert os.path.basename(sys.executable)[:6] in message
    assert ", started 2" in message
    assert message.endswith("choose another --master-port, or leave it out to take a free one")


def test_a_port_may_be_kept_for_who_listens_later():
    with claim_port(0, backlog=0) as kept:
        port = kept.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may bind every port")
def test_a_forbidden_port_says_why():
    with pytest.raises(LaunchError, match=r"port 1 cannot be bound on 127\.0\.0\.1: Permission denied; choose another"):
        claim_port(1, backlog=4)
