"""Load generation, measurement and comparison behind the scripts in ``benchmark/``.

``workload`` says what is sent, ``arrivals`` and ``load`` when, ``client`` sends one request and
times it, ``statistics`` and ``report`` make figures of it, ``server`` starts and ends what is
measured, ``comparison`` runs the contenders one after another.
"""
