"""What every part of hooktrain uses: ranks, seeds, files, logs, metrics."""
