"""The controller: settles the ledger and removes what dead pods leave behind."""
