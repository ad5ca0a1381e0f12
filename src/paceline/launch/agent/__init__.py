"""What a conductor starts on each host: a launcher that has it in place of a user and of a rendezvous."""
