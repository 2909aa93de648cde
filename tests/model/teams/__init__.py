"""A model of team ledgers. A team ledger allots parts of a team's quota to the ledgers of the team's namespaces."""
