"""What tests stand on: merchants, providers, chains, disks and processes, a file a thing. No test is in here."""
