"""Show the course of a run: `nemo_rl report` writes one HTML file, `nemo_rl watch` serves the same page during the run.

    run_files ─► curves, samples, phases, findings ─► page ─► report.html
                                                   └► server ─► browser

The scripts of the page (`assets/`) read JSON and draw it; no text of a run is ever inserted as HTML.
"""
