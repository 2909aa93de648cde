"""Recounts the ledgers from the stored pods and claims, and publishes usage.

The ledger of a namespace stores the charges of the namespace. `recounter` recounts ledgers, `charge_ages` finds expired
charges, `publisher` writes the usage of a namespace, and `labels` labels the namespaces without a limit. `grants`
recounts namespaces when a dated addition to a limit begins or ends. `team_allotments` keeps the parts of a team's quota
that its namespaces may use, and `team_usages` adds up the usage of a team.
"""
